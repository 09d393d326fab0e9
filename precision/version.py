"""The version of the pack, as in pyproject.toml, which an installed pack cannot be asked for."""

VERSION = "1.3.0"
