"""The messages between servers and clients, and the commands that clients run: types only, without torch.

Imports: errors.
"""
