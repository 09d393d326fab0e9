"""The version of the pack, as in pyproject.toml, which an installed pack cannot be asked for."""

VERSION = "1.2.0"
