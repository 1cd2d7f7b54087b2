"""The version, for the package, the command line and the wheel."""

VERSION = "0.1.0"
