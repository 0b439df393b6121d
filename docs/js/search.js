// The search reads a leading dash as «not»: it would find nothing for `--link`. Leave such dashes out.
document.addEventListener(
  "input",
  (event) => {
    const box = event.target;
    if (box.matches(".md-search__input")) box.value = box.value.replace(/(^|\s)-+/g, "$1");
  },
  true,
);
