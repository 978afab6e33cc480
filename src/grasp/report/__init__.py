"""What is known of an artifact, on one page that needs no network; or live, by `serve`.

In: an artifact, perhaps runs, a selection, a mixture, suspects. Out: one HTML file. Read `verb` first, then `findings`
(every number and text of the page) and `page` (how they are shown). Texts of the corpus are untrusted: they are escaped
wherever they stand, and a content-security-policy with the checksums of our own scripts keeps anything else from
running.
"""
