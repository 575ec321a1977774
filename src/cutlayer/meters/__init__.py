"""Meters watch the verbs; methods never mention them."""
