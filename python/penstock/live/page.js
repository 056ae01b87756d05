"use strict";
const at = (id) => document.getElementById(id);
const make = (name, text, of) => {
  const made = document.createElement(name);
  made.textContent = text;
  if (of) of.append(made);
  return made;
};
// What is the same stays as it is: a reader may have selected or scrolled it.
const drawn = new Map();
const changed = (name, value) => {
  const text = JSON.stringify(value);
  const isNew = drawn.get(name) !== text;
  drawn.set(name, text);
  return isNew;
};
const list = (target, texts) => {
  target.replaceChildren();
  for (const text of texts) make("li", text, target);
};

function table(given, section) {
  const { title, note, columns, rows } = given;
  let [head, said, scroll] = section.children;
  if (!head) {
    head = make("h2", "", section);
    said = make("p", "", section);
    said.className = "note";
    scroll = make("div", "", section);
    scroll.className = "scroll";
    scroll.tabIndex = 0;
  }
  head.textContent = title;
  said.textContent = note;
  const made = document.createElement("table");
  const top = make("tr", "", make("thead", "", made));
  for (const column of columns) make("th", column, top).scope = "col";
  const body = make("tbody", "", made);
  for (const row of rows) {
    const line = make("tr", "", body);
    row.forEach((text, index) => {
      const cell = make(index ? "td" : "th", text, line);
      if (index) cell.title = text;
      else cell.scope = "row";
    });
  }
  scroll.replaceChildren(made);
}

// Drawn here and not by penstock.reports: each look changes it, and matplotlib in rank 0 would cost a tenth of a second a look.
function line(history) {
  at("history").hidden = history.length < 2;
  if (history.length < 2) return;
  const most = Math.max(...history), least = Math.min(...history);
  const low = most > least ? Math.max(0, least - (most - least) * 0.1) : 0, high = Math.max(most, low + 1e-9);
  const x = (index) => 600 * index / (history.length - 1), y = (value) => 86 - 80 * (value - low) / (high - low);
  const points = history.map((value, index) => x(index).toFixed(1) + "," + y(value).toFixed(1));
  document.querySelector("#history polyline").setAttribute("points", points.join(" "));
}

function show(job) {
  at("answer").textContent = job.answer;
  at("setting").textContent = job.setting;
  document.title = "penstock live: " + job.answer;
  at("alarms").hidden = !job.alarms.length;
  if (changed("alarms", job.alarms)) list(at("alarms"), job.alarms);
  if (changed("history", job.history)) line(job.history);
  at("span").textContent = job.span;
  if (changed("cards", job.cards)) {
    at("cards").replaceChildren();
    for (const [number, what, note] of job.cards) {
      const card = make("div", "", at("cards"));
      card.className = "card";
      make("b", number, card);
      make("span", what, card);
      make("small", note, card);
    }
  }
  const tables = at("tables");
  while (tables.children.length > job.tables.length) tables.lastChild.remove();
  job.tables.forEach((each, index) => {
    if (index >= tables.children.length) {
      make("section", "", tables);
      drawn.delete("table " + index);
    }
    if (changed("table " + index, each)) table(each, tables.children[index]);
  });
  at("complaints").hidden = !job.complaints.length;
  if (changed("complaints", job.complaints)) list(at("complaints").lastElementChild, job.complaints);
}

let state = "connecting", heard = Date.now();
function say(text, isBad) {
  at("state").textContent = text;
  at("state").className = isBad ? "bad" : "";
  document.querySelector("main").className = isBad ? "old" : "";
}
const source = new EventSource("events" + location.search);
source.onmessage = (event) => {
  const job = JSON.parse(event.data);
  heard = Date.now();
  state = job.state;
  show(job);
  if (state === "ended") {
    source.close();
    say("ended", true);
  } else say(state === "running" ? "live" : state, false);
};
setInterval(() => {
  const silent = Math.round((Date.now() - heard) / 1000);
  if (state === "ended") return;
  if (source.readyState === EventSource.CLOSED) say("not allowed, or too many viewers: reload with the URL that rank 0 printed", true);
  else if (silent >= 5) say("connection lost " + silent + " s ago; trying again", true);
}, 1000);
