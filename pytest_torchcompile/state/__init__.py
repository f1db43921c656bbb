"""What a run can change, and how it is put back: models, torch's settings, random states."""
