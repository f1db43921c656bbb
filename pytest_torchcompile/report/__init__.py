"""What a run leaves behind: the journal while it runs, the report, and what the terminal shows. No torch.

To read in this order:

* The record: :mod:`.schema` says what a report is, :mod:`.record` makes one of verdicts, also of tests that are no
  cells, :mod:`.journal` writes each verdict at once. :mod:`.provenance` says where a report comes from and whether it
  is as its run wrote it: fingerprints and the seal.
* The file: :mod:`.keeping` decides what becomes of the report before, with :mod:`.takeover`, :mod:`.earlier` and
  :mod:`.safe_output`.
* Back from a file: :mod:`.reading`, with :mod:`.strictjson`; :mod:`.merging` of shards.
* What it says: :mod:`.facts` and :mod:`.metrics` of one cell, :mod:`.causes` of all of them, :mod:`.finding` with
  the headline. :mod:`.terminal` and :mod:`.reproduction` are texts for the user, which :mod:`.safe_output`
  guards.
"""
