"""Bridges to other libraries, each a module that is imported by name and only then needs its library."""
