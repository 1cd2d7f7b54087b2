"""Reopen a plan: why, why not, robustness, staleness."""
