"""Prompt builders of both roles, and the packing of finished sequences into training batches."""
