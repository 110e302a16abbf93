"""The shelf: kinds that few recipes need, one a file, with the settings class beside the kind.

A recipe names a kind by its short name (``pubmed``) or its path (``leret.extras.pubmed:PUBMED``). The family's settings
class in `leret.config` lists the short names. Nothing else in leret imports the shelf.
"""
