"""Running Python programs that nobody trusts: those that a model wrote.

A program gets its text, its input and an empty directory, and returns what it printed. It reads nothing but Python's
own library, writes nowhere else, reaches no network and no other process, and is ended when it takes too much. Linux
has what this needs, Landlock and seccomp; it needs no root, no namespaces and no packages. Where something is missing,
nothing is run. `client.run` is the way in; nothing here imports torch.
"""
