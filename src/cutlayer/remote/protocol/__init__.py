"""Messages between servers and clients, and the commands that clients run: types alone, without torch.

Imports: errors.
"""
