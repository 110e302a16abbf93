"""Builders of leret's shipped policies; see README.md in this folder."""
