"""Sandbox for untrusted Python programs, such as those that a model wrote.

A program gets its text, its input and an empty directory, and returns what it printed. It reads nothing but Python's
own library, reaches no network and no other process, and is ended when it takes too much. This needs Landlock and
seccomp of Linux; without, nothing is run. `client.run` is the way in.
"""
