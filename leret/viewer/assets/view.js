"use strict";
// Keyboard, arcs from chosen to rejected samples, the system to compare with, marks of tables that are cut, updates of a
// growing run, and filters of static pages. Pages work without it. It never builds HTML from data: all HTML that it
// inserts was escaped by the server.

const main = () => document.getElementById("main");
const rows = () => [...main().querySelectorAll(".row")].filter((row) => !row.hidden && row.getClientRects().length);
let selected = -1;

function select(place) {
  const all = rows();
  if (!all.length) return;
  main().querySelector(".selected")?.classList.remove("selected");
  selected = Math.max(0, Math.min(place, all.length - 1));
  all[selected].classList.add("selected");
  all[selected].scrollIntoView({ block: "nearest" });
  mark(all[selected]);
}

function open(row) {
  const link = row.querySelector("th a");
  if (link) return link.click();
  const details = row.matches("details") ? row : row.querySelector("details");
  if (details) details.open = !details.open;
}

const KEYS = {
  j: () => select(selected + 1),
  k: () => select(selected - 1),
  n: () => main().querySelector("a[rel=next]")?.click(),
  p: () => main().querySelector("a[rel=prev]")?.click(),
  "?": () => document.getElementById("help").showModal(),
  "/": () => {
    const field = document.getElementById("search");
    if (field) field.select(), field.focus();
    else document.querySelector('.top a[href*="questions"]')?.click();
  },
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, select, textarea, dialog")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "Enter" && event.target === document.body && rows()[selected]) open(rows()[selected]);
  if (!KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});
document.getElementById("keys")?.addEventListener("click", KEYS["?"]);

function mark(card) {
  const list = card.closest(".siblings");
  for (const path of list?.querySelectorAll(".arcs path") ?? [])
    path.classList.toggle("on", path.dataset.ends.split(" ").includes(card.dataset.n));
}

function draw() {
  const narrow = matchMedia("(max-width: 600px)").matches;
  for (const list of main().querySelectorAll(".siblings")) {
    list.querySelector(".arcs")?.remove();
    const cards = [...list.querySelectorAll(".card")];
    const arcs = cards.flatMap((card) => (card.dataset.beats ? card.dataset.beats.split(" ") : []).map((n) => [card, cards[n - 1]]));
    list.style.setProperty("--arcs", arcs.length ? (narrow ? "22px" : "46px") : "0px");
    if (!arcs.length) continue;
    const width = narrow ? 22 : 46;
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("class", "arcs");
    svg.setAttribute("aria-hidden", "true");
    for (const [from, to] of arcs) {
      const [a, b] = [from, to].map((card) => card.offsetTop + 18);
      const reach = Math.max(2, width - 6 - (width - 10) * Math.min(1, (Number(to.dataset.n) - Number(from.dataset.n)) / cards.length + 0.25));
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", `M${width} ${a} C${reach} ${a} ${reach} ${b} ${width - 2} ${b} l-5 -4 m5 4 l-5 4`);
      path.dataset.ends = `${from.dataset.n} ${to.dataset.n}`;
      svg.append(path);
    }
    list.append(svg);
  }
  cue();
}

function cue() {
  for (const box of main().querySelectorAll(".scroll")) {
    const rest = box.scrollWidth - box.clientWidth - box.scrollLeft;
    box.classList.toggle("left", box.scrollLeft > 2);
    box.classList.toggle("right", rest > 2);
  }
}

addEventListener("mouseover", (event) => {
  const card = event.target.closest?.(".card");
  if (card) mark(card);
});
addEventListener("resize", draw);
addEventListener("toggle", draw, true);
addEventListener("scroll", cue, true);

// The system to compare with, in a table of systems and in the searches of a question.
function compare(choice) {
  const section = choice.closest("section");
  const name = choice.selectedOptions[0]?.textContent ?? "";
  for (const label of section.querySelectorAll(".rival-name")) if (label.closest("section") === section) label.textContent = name;
  for (const cell of section.querySelectorAll("[data-rival]")) cell.hidden = cell.dataset.rival !== choice.value;
  for (const plot of section.querySelectorAll(".dots")) {
    const rival = [...plot.querySelectorAll(".row-of-dots")].find((row) => row.dataset.system === choice.value);
    if (rival?.dataset.at) for (const line of plot.querySelectorAll(".rival-line")) line.setAttribute("d", `M${rival.dataset.at} 0V100`);
  }
}

// Words to keep, to delete and to insert: the longest common subsequence.
function differences(before, after) {
  const [a, b] = [before, after].map((text) => text.split(/\s+/).filter(Boolean));
  const length = [...a, ""].map(() => new Array(b.length + 1).fill(0));
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--) length[i][j] = a[i] === b[j] ? length[i + 1][j + 1] + 1 : Math.max(length[i + 1][j], length[i][j + 1]);
  const parts = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) parts.push(["", b[j]]), i++, j++;
    else if (i < a.length && (j === b.length || length[i + 1][j] >= length[i][j + 1])) parts.push(["del", a[i++]]);
    else parts.push(["ins", b[j++]]);
  }
  return parts;
}

function compareSearches(choice) {
  const searches = [...choice.closest("section").querySelectorAll("tr[data-system]")];
  for (const row of searches) {
    const rival = searches.find((other) => other.dataset.system === choice.value && other.dataset.hop === row.dataset.hop);
    const cell = row.querySelector(".search");
    if (cell) {
      const text = rival && rival !== row ? rival.querySelector(".search")?.dataset.text : undefined;
      const parts = text === undefined ? [["", cell.dataset.text]] : differences(text, cell.dataset.text);
      cell.replaceChildren(
        ...parts.flatMap(([tag, word]) => {
          const part = tag ? document.createElement(tag) : document.createTextNode(word);
          if (tag) part.textContent = word;
          return [part, document.createTextNode(" ")];
        }),
      );
    }
    row.querySelectorAll("td[data-rank]").forEach((rank, i) => {
      const [now, before] = [rank, rival?.querySelectorAll("td[data-rank]")[i]].map((at) => Number(at?.dataset.rank ?? 0));
      const compared = rival && rival !== row;
      rank.classList.toggle("up", Boolean(compared && now && (!before || now < before)));
      rank.classList.toggle("down", Boolean(compared && before && (!now || now > before)));
      rank.querySelector("small").textContent = compared && now && before && now !== before ? `${before > now ? "+" : "−"}${Math.abs(before - now)}` : "";
    });
  }
}

addEventListener("change", (event) => {
  if (event.target.matches("select.rival")) compare(event.target);
  if (event.target.matches("select.rival-search")) compareSearches(event.target);
  cue();
});

function begin() {
  for (const choice of main().querySelectorAll("select.rival")) compare(choice);
  for (const choice of main().querySelectorAll("select.rival-search")) compareSearches(choice);
  draw();
}

async function refresh() {
  const text = await (await fetch(location.href)).text();
  const fresh = new DOMParser().parseFromString(text, "text/html").getElementById("main");
  if (!fresh) return;
  for (const details of main().querySelectorAll("details[id]")) {
    const twin = fresh.querySelector(`#${CSS.escape(details.id)}`);
    if (twin) twin.open = details.open;
  }
  const choices = (root) => [...root.querySelectorAll("select.rival, select.rival-search, input.toggle")];
  choices(main()).forEach((choice, i) => {
    const twin = choices(fresh)[i];
    if (twin) (twin.value = choice.value), (twin.checked = choice.checked);
  });
  main().replaceWith(fresh);
  if (selected >= 0) select(selected);
  begin();
}

function follow(address) {
  setInterval(async () => {
    if (document.hidden || main().contains(document.activeElement?.closest("form, .controls"))) return;
    try {
      const version = await (await fetch(`${address}?path=${encodeURIComponent(location.pathname)}`)).text();
      if (version !== main().dataset.version) await refresh();
    } catch {
      // the server stopped; the page stays as it is
    }
  }, 1000);
}

function filterRows(form) {
  const number = (text) => (text === "" || text === undefined ? null : Number(text));
  const values = Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
  const between = (value, low, high) => (low === null || (value !== null && value >= low)) && (high === null || (value !== null && value <= high));
  const signs = { improved: 1, worsened: -1, equal: 0 };
  const yes = (value, wanted) => !wanted || (value !== null && value > 0 === (wanted === "yes"));
  let shown = 0;
  for (const row of main().querySelectorAll("tr.row")) {
    const data = row.dataset;
    const text = `${data.question ?? ""} ${data.questionId}`.toLowerCase();
    const size = number(data.margin ?? data.best);
    row.hidden = !(
      text.includes((values.search ?? "").toLowerCase()) &&
      (!values.steps || data.steps === values.steps) &&
      (!values.step || data.step === values.step) &&
      (!values.reason || data.reason === values.reason) &&
      between(size, number(values.min), number(values.max)) &&
      yes(number(data.spread), values.spread) &&
      yes(number(data.failures) ?? 0, values.failures) &&
      (!values.change || (values.change in signs ? data.difference !== undefined && Math.sign(data.difference) === signs[values.change] : data.difference === undefined))
    );
    shown += !row.hidden;
  }
  document.getElementById("count").textContent = shown;
  return values;
}

const form = document.getElementById("filters");
if (document.body.dataset.static && form) {
  for (const [name, value] of new URLSearchParams(location.search)) if (form.elements[name]) form.elements[name].value = value;
  filterRows(form);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    history.replaceState(null, "", `?${new URLSearchParams(filterRows(form))}`);
  });
}
if (document.body.dataset.live) follow(document.body.dataset.live);
begin();
