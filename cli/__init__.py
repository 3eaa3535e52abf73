"""`dilocox …`: one file per verb. The only package that may import both node and coordinator."""
