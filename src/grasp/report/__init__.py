"""HTML report of an artifact: one self-contained file, or the live page of `grasp.serving`.

Input: an artifact; optionally retrained runs, a selection, a mixture and a table of suspicious rows. Start with
`build_report.report`; `findings` collects every number and text of the page, `page` renders them.

Corpus text is untrusted. All of it is escaped, and a content security policy that lists the hashes of the page's own
scripts prevents any other script from running.
"""
