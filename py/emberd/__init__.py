"""emberd keeps a small language model warm for every program on a machine.

The `emberd` command serves it over HTTP and over a Unix socket. Importing the package costs nothing: engines are imported when a model is loaded.
"""
