"""How results are shown: text, tables, charts."""
