"""Stand-ins for attention libraries: their functions' exact signatures, their layouts and their LSE conventions.

They compute by reading keys through the page tables (``standins.paged``) and insist on what the libraries insist on.
What a library does with a row without keys differs from one to the other; nobody may rely on it, so here it fails.
``tests/attention/test_signatures.py`` holds the signatures against the libraries' sources.
"""
