"""`python -m mha_ext train`: trains a Transformer on text with any of four attention modules. Start at cli.py."""
