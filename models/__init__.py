"""Builders of the policies that ship with leret; see README.md in this folder."""
