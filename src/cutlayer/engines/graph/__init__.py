"""One recorded chain of operations for each slot of clients, replayed step after step.

What is asked of this engine waits in a queue for each client (`queue`) until somebody needs a value. Then the whole
chain of the client's step runs at once (`lane`): the first times as it is, so that shapes and what is read later become
known, and from then on as a recording that reads and writes rows of fixed memory (`forms`).

Nothing else knows of these rows: what treats values in rows in its own way is registered in `rows` and `in_place`.
"""
