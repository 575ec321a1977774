"""Identities: the CA, certificates, folders of keys and the register of clients.

Imports: core, errors.
"""
