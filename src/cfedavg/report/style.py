"""The style sheet of the page: light and dark, wide and narrow, nothing to fetch."""

CSS = """
:root { color-scheme: light dark; --ink: #1f2328; --muted: #59636e; --line: #d9dee3; --paper: #ffffff;
  --shade: #f5f7f9; --mark: #fff3c4; --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --muted: #9aa5b1; --line: #323a44; --paper: #12161c; --shade: #1b2129;
    --mark: #4a3d0c; --accent: #6cb8e6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem clamp(1rem, 4vw, 2.5rem) 3rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  overflow-wrap: anywhere; -webkit-text-size-adjust: 100%; }
h1 { font-size: clamp(1.4rem, 1rem + 2vw, 2.1rem); line-height: 1.2; margin: .2rem 0 .6rem; max-width: 32em;
  text-wrap: balance; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .8rem; }
p { margin: .4rem 0 .8rem; max-width: 56em; }
.kicker { color: var(--accent); font-weight: 600; font-size: .9rem; }
.muted, figcaption, footer { color: var(--muted); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
.scroll > table { min-width: 100%; overflow-wrap: normal; }
th, td { text-align: left; padding: .4rem .9rem .4rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
thead th { color: var(--muted); font-weight: 600; white-space: nowrap; }
tbody th { font-weight: 600; }
.summary td { white-space: nowrap; }
.summary tbody th { min-width: 11rem; }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .5em;
  outline: 1px solid var(--line); }
.panels { display: grid; gap: 1.4rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); }
figure { margin: 0; }
.card { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: .6rem; }
img { display: block; width: 100%; height: auto; }
figcaption { margin: .45rem .1rem 0; }
details { border: 1px solid var(--line); border-radius: 8px; margin: .6rem 0; padding: .1rem .9rem; }
summary { cursor: pointer; padding: .5rem 0; font-weight: 600; }
details table { width: 100%; margin-bottom: .8rem; }
details th { font-weight: 400; color: var(--muted); width: 13rem; }
.differs > * { background: var(--mark); color: var(--ink); padding-left: .4rem; }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .88em; }
pre { background: var(--shade); border-radius: 8px; padding: .7rem .9rem; overflow-x: auto; margin: .5rem 0; }
footer { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: .8rem; }
@media (max-width: 44rem) { /* a row of the summary becomes a card of its own */
  details th { width: 52%; }
  .summary thead { display: none; }
  .summary, .summary tbody, .summary tr, .summary th, .summary td { display: block; }
  .summary tr { border: 1px solid var(--line); border-radius: 8px; padding: .4rem .9rem; margin: .6rem 0; }
  .summary th, .summary td { border: 0; padding: .15rem 0; }
  .summary td { display: flex; justify-content: space-between; gap: 1rem; }
  .summary td::before { content: attr(data-name); color: var(--muted); } }
"""
