"""What a run leaves behind: the journal while it runs, the report, and what the terminal shows. No torch.

To read in this order:

* The record: :mod:`.schema` says what a report is, :mod:`.record` makes one of verdicts, :mod:`.journal` writes each
  verdict at once. :mod:`.testrecord` holds tests that are no cells, :mod:`.provenance` where a report comes from.
* The file: :mod:`.keeping` decides what becomes of the report before, with :mod:`.takeover`, :mod:`.earlier` and
  :mod:`.files`. :mod:`.evidence` has the fingerprints and the seal.
* Back from a file: :mod:`.reading`, with :mod:`.strictjson` and :mod:`.validation`; :mod:`.merging` of shards.
* What it says: :mod:`.facts` and :mod:`.metrics` of one cell, :mod:`.causes` of all of them, :mod:`.headline`,
  :mod:`.finding`. :mod:`.terminal` and :mod:`.reproduction` are texts for the user, :mod:`.harmless` guards them.
"""
