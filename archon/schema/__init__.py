"""Configuration types, errors and protocols shared by all packages; imports neither torch nor other packages."""
