"""emberd keeps a small language model warm for every program on a machine.

Python's part is small: the engines, which turn token ids into token ids, and the loop that runs one of them. Everything
else is in the extension module `emberd._core`. Importing this package imports no engine.
"""
