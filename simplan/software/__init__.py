"""Profiles of training frameworks."""
