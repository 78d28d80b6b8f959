"""Presets as functions; they import gattn.config only."""
