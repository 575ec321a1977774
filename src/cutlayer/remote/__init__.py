"""Clients that are somewhere else: who they are, what they may send, and how it crosses."""
