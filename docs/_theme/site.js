// Dark and light, and the search of pages that come from the disk.
"use strict";

// What the reader chose counts, else what the system says. Choosing what the system says forgets the choice.
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

function chosenTheme() {
  try { return localStorage.getItem("theme"); } catch { return null; }
}

function showTheme() {
  const theme = chosenTheme() || (systemIsDark.matches ? "dark" : "light");
  document.documentElement.dataset.theme = theme;
  for (const button of document.querySelectorAll(".theme-toggle")) {
    button.textContent = theme === "dark" ? "Light" : "Dark";
  }
}

function changeTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try {
    if ((theme === "dark") === systemIsDark.matches) localStorage.removeItem("theme");
    else localStorage.setItem("theme", theme);
    showTheme();
  } catch {
    document.documentElement.dataset.theme = theme;
  }
}

showTheme();
systemIsDark.addEventListener("change", showTheme);
document.addEventListener("DOMContentLoaded", () => {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "theme-toggle";
  button.title = "Change between dark and light";
  button.addEventListener("click", changeTheme);
  document.querySelector(".rst-content").prepend(button);
  showTheme();
});

// A browser gives pages from the disk no worker and no JSON, but scripts: they stand in for mkdocs' search worker.
function loadScript(name, done) {
  const script = document.createElement("script");
  script.src = `${base_url}/search/${name}`;
  script.onload = done;
  document.head.append(script);
}

class Searcher {
  postMessage(message) {
    if (message.init) loadScript("lunr.js", () => loadScript("search_index.js", () => this.build(searchIndex)));
    else this.onmessage({ data: { results: this.index.search(message.query).map((found) => this.pages.get(found.ref)) } });
  }

  build({ config, docs }) {
    lunr.tokenizer.separator = new RegExp(config.separator);
    this.pages = new Map(docs.map((page) => [page.location, { ...page, summary: page.text.slice(0, 200) }]));
    this.index = lunr((builder) => {
      for (const field of ["title", "text"]) builder.field(field);
      builder.ref("location");
      for (const page of docs) builder.add(page);
    });
    this.onmessage({ data: { config } });
    this.onmessage({ data: { allowSearch: true } });
  }
}

if (location.protocol === "file:") window.Worker = Searcher;
