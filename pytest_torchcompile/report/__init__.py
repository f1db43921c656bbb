"""What a run leaves behind: the journal while it runs, the report, and what the terminal shows. No torch."""
