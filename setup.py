"""What pyproject.toml can't say: the folder `models` is installed inside the package, as `autoshard.models`."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["autoshard*"]), "autoshard.models"],
    package_dir={"autoshard": "autoshard", "autoshard.models": "models"},
)
