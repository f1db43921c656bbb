"""The playbook: what a report says about compiling this repository's models, as Markdown to keep in it. No torch.

To read in this order: ``chapters`` (the document, the command, and what went wrong and how to see it), ``choice``
(which setting to use), ``practice`` (warm-up, caches, sizes). ``gate/markdown`` has the pieces that it is written with.
"""
