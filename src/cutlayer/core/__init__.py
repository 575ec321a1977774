"""The vocabulary: places and the verbs between them, values, the laws, and the protocols that engines and meters fill.

Imports: errors.
"""
