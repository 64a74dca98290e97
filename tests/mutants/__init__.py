"""Mistakes that the tests must find, and the tool that makes each of them and sees whether they do."""
