"""Handoff of a teacher's output to the student's process, bypassing the driver."""
