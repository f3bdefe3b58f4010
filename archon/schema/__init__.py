"""Configuration types, errors and protocols that several rooms share; imports neither torch nor any other room."""
