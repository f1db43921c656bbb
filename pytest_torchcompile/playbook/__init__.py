"""The playbook: what a report says about compiling this repository's models, as Markdown to keep in it. No torch.

To read in this order: ``chapters`` (the document and the command), ``choice`` (which setting to use), ``gotchas`` (what
went wrong, and how to see it), ``practice`` (warm-up, caches, sizes), ``prose`` (texts of a report within Markdown).
"""
