"""The HTML page of reports: heat map, findings, each cell's article. No torch, no template library, no network.

To read in this order:

``document``: the whole page, the data for its script, and the command
``shell``: what makes one file of it that loads nothing
``markup``: letters and colours, elements whose text is escaped, the pieces made of them
``masthead``: the verdict, a card for each severity, what was run when and where
``overview``: what the gate says, tests, pass rates, the run
``past_runs``, ``trend``, ``baseline_comparison``: earlier runs of a folder, and a baseline
``heatmap``, ``controls``: which axes come first, the table of squares, what it shows and how
``article``, ``ledger_tables``, ``expectations``: everything about one cell, and what was asked of it
``svg``, ``models_table``: the map alone as a picture, the models as a table of Markdown

``page.js`` sorts, filters and colours; without it the page is complete. ``page.css`` has what no theme
changes.
"""
