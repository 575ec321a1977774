"""Record the chain of operations of a client's step once, and replay it step after step.

Operations wait in a queue for each client (`queue`) until a value is needed. Then the client's whole chain runs
(`lane`): eagerly at first, which shows the shapes and which values are read later, and from then on as a recording that
reads and writes fixed rows of memory (`forms`).

No other package knows of these rows: `rows` and `in_place` register how values in rows are handled.
"""
