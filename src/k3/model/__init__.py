"""The graph of Kimi K3: one file per component of the papers, and the states that sequences carry."""
