"use strict";
// The rollout-tree explorer. Texts of models are only ever set as textContent.
(() => {
  const index = JSON.parse(document.getElementById("index").textContent);
  const [runs, steps, items] = ["tree-run", "tree-step", "tree-item"].map((id) => document.getElementById(id));
  const root = document.getElementById("tree"), detail = document.getElementById("detail");
  const cache = new Map(); // id of a data block → its trees
  let tree, nodes, scale; // the tree shown, its nodes by path, lowest and highest reward in it, or 0

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children.filter((child) => child != null));
    return element;
  }
  function mean(value) { // of what is no list, itself; null is left out
    if (!Array.isArray(value)) return value;
    const own = value.filter((entry) => entry != null);
    return own.length ? own.reduce((a, b) => a + b, 0) / own.length : null;
  }
  const plain = (value) => (value == null ? "–" : String(Number(value.toPrecision(3))));
  const number = (value) => (Array.isArray(value) ? value.map(plain).join(" / ") : plain(value));
  const signed = (value) => (value > 0 ? "+" : "") + plain(value);
  const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
  const key = (path) => path.join(",");
  const starts = (branch, path) => path.every((joint, turn) => branch[turn] === joint);
  const several = () => tree.best_reward !== tree.worst_reward;

  // ---- choosing ----
  function fill(select, options) {
    select.replaceChildren(...options.map(([text, value]) => make("option", { value }, text)));
  }
  function chooseRun() {
    const groups = ["train", "eval"].map((split) => {
      const own = index[runs.value].steps.map((entry, place) => [entry, place]).filter(([entry]) => entry.split === split);
      return own.length && make("optgroup", { label: split === "train" ? "training" : "evaluation" },
        ...own.map(([entry, place]) => make("option", { value: place }, `${split === "eval" ? "evaluation at " : ""}step ${entry.step} · ${entry.trees} of ${counted(entry.total, "tree")}`)));
    });
    steps.replaceChildren(...groups.filter(Boolean));
    const training = index[runs.value].steps.filter((entry) => entry.split === "train");
    if (training.length) steps.value = index[runs.value].steps.indexOf(training[training.length - 1]);
    chooseStep();
  }
  function chooseStep() {
    const entry = index[runs.value].steps[steps.value];
    if (!entry) return showNothing();
    fill(items, trees(entry).map((own, place) => {
      return [`item ${own.item} · mean return ${plain(mean(own.nodes[0].returns.map(mean)))}`, place];
    }));
    chooseItem();
  }
  function trees(entry) {
    if (!cache.has(entry.data)) cache.set(entry.data, JSON.parse(document.getElementById(entry.data).textContent));
    return cache.get(entry.data);
  }
  function showNothing() {
    items.replaceChildren();
    root.replaceChildren();
    detail.replaceChildren(make("p", { class: "hint" }, "No trees of this run are on the page."));
  }

  // ---- the tree ----
  function chooseItem() {
    tree = trees(index[runs.value].steps[steps.value])[items.value];
    nodes = new Map(tree.nodes.map((node) => [key(node.path), node]));
    const rewards = tree.nodes.flatMap((node) => node.rewards.map(mean)).filter((value) => value != null);
    root.parentElement.style.setProperty("--agents", tree.nodes[0].responses.length);
    scale = [Math.min(0, ...rewards), Math.max(0, ...rewards)]; // bars start at 0
    root.replaceChildren(...rows(nodes.get(""), 1));
    let place = root.querySelector("[role=treeitem]");
    for (let turn = 1; turn <= tree.best.length; turn++) { // the best branch lies open
      place = find(tree.best.slice(0, turn)) ?? place;
      open(place);
    }
    select(find(tree.best.slice(0, 1)) ?? root.firstChild);
  }
  const find = (path) => root.querySelector(`[data-path="${key(path)}"]`);
  const pathOf = (item) => item.dataset.path.split(",").map(Number);

  function rows(node, level) {
    return node.rewards.map((_, joint) => row(node, joint, level));
  }
  function row(node, joint, level) {
    const path = [...node.path, joint], reward = mean(node.rewards[joint]);
    const ks = node.joints[joint], aligned = ks.every((k) => k === ks[0]) && node.joints.length === node.responses[0].length;
    const share = reward == null || scale[1] === scale[0] ? 0 : (reward - scale[0]) / (scale[1] - scale[0]);
    const bar = make("span", { class: "bar" });
    bar.style.setProperty("--share", `${Math.round(100 * share)}%`);
    bar.append(number(node.rewards[joint]));
    const advantages = node.advantages == null ? ["–"] : ks.map((k, agent) => {
      const value = node.advantages[agent][k];
      return make("span", { class: value > 0 ? "up" : value < 0 ? "down" : "" }, `${agent ? " / " : ""}${signed(value)}`);
    });
    const marks = several() ? [
      starts(tree.best, path) && path.length <= tree.best.length ? make("span", { class: "best" }, "▲ best") : null,
      starts(tree.worst, path) && path.length <= tree.worst.length ? make("span", { class: "worst" }, "▼ worst") : null,
    ] : [];
    const whose = { empty: (k, agent) => !node.responses[agent][k].trim(), truncated: (k, agent) => node.truncated[agent][k] };
    const flags = Object.entries(whose).flatMap(([word, holds]) => {
      const agents = ks.map((_, agent) => agent).filter((agent) => holds(ks[agent], agent));
      if (!agents.length) return [];
      return [agents.length === 1 ? `agent ${agents[0]} ${word}` : agents.length === ks.length ? `all ${word}` : `agents ${agents.join(", ")} ${word}`];
    });
    const children = nodes.has(key(path));
    const name = make("span", { class: "name" }, make("span", { class: "twist", "aria-hidden": "true" }, children ? "▸" : ""),
      `turn ${level} · ${aligned ? joint : ks.join("|")}`, ...marks, ...flags.map((flag) => make("span", { class: "badge" }, flag)));
    const line = make("div", { class: "row" }, name, bar, make("span", { class: "num" }, number(node.returns[joint])), make("span", { class: "num advantages" }, ...advantages));
    const item = make("li", { role: "treeitem", tabindex: "-1", "aria-level": level, "aria-selected": "false", "data-path": key(path),
      "aria-label": `turn ${level}, joint response ${joint}, reward ${number(node.rewards[joint])}, return ${number(node.returns[joint])}${marks.filter(Boolean).map((mark) => ", " + mark.textContent.slice(2)).join("")}${flags.map((flag) => ", " + flag).join("")}` }, line);
    if (children) item.setAttribute("aria-expanded", "false");
    return item;
  }
  function open(item) {
    if (item?.getAttribute("aria-expanded") !== "false") return;
    item.setAttribute("aria-expanded", "true");
    const group = item.querySelector("ul");
    if (group) group.hidden = false;
    else item.append(make("ul", { role: "group" }, ...rows(nodes.get(item.dataset.path), Number(item.getAttribute("aria-level")) + 1)));
  }
  function close(item) {
    item.setAttribute("aria-expanded", "false");
    item.querySelector("ul").hidden = true;
  }
  function select(item) {
    if (!item) return showNothing();
    for (const other of root.querySelectorAll("[aria-selected=true], [tabindex='0']")) {
      other.setAttribute("aria-selected", "false");
      other.tabIndex = -1;
    }
    item.setAttribute("aria-selected", "true");
    item.tabIndex = 0;
    show(pathOf(item));
  }

  // ---- the texts ----
  function shown(text) {
    return text.trim() ? make("pre", {}, text) : make("em", {}, text ? `(only white space, ${counted(text.length, "character")})` : "(empty)");
  }
  function content(prompt) {
    if (!Array.isArray(prompt)) return [shown(String(prompt))];
    return prompt.map((message) => make("div", { class: "message" }, make("div", { class: "role" }, String(message.role)),
      shown(typeof message.content === "string" ? message.content : JSON.stringify(message.content))));
  }
  function show(path) {
    const node = nodes.get(key(path.slice(0, -1))), joint = path[path.length - 1];
    const crumbs = path.map((own, turn) => make("button", { type: "button", "data-path": key(path.slice(0, turn + 1)) }, `turn ${turn + 1} · ${own}`));
    const numbers = make("p", { class: "numbers" }, "reward ", make("b", {}, number(node.rewards[joint])), " · return ", make("b", {}, number(node.returns[joint])),
      node.returns.length > 1 ? ` · mean return of this node ${plain(mean(node.returns.map(mean)))}` : "");
    const agents = node.joints[joint].map((k, agent) => {
      const text = node.responses[agent][k], advantage = node.advantages?.[agent]?.[k];
      return make("article", {}, make("h4", {}, `Agent ${agent}`, make("small", {}, ` response ${k} · ${counted(node.token_counts[agent][k], "token")}${advantage == null ? "" : ` · advantage ${signed(advantage)}`}`),
        node.truncated[agent][k] ? make("span", { class: "badge" }, "truncated") : null),
        make("p", { class: "label" }, "prompt"), make("div", { class: "text prompt", tabindex: "0" }, ...content(node.prompts[agent])),
        make("p", { class: "label" }, "response"), make("div", { class: "text response", tabindex: "0" }, shown(text)));
    });
    const back = make("button", { type: "button", class: "back" }, "↑ back to the tree");
    back.addEventListener("click", () => root.querySelector("[tabindex='0']").focus());
    detail.replaceChildren(make("p", { class: "crumbs" }, ...crumbs.flatMap((crumb, turn) => (turn ? [" → ", crumb] : [crumb]))), numbers, make("div", { class: "agents" }, ...agents), back);
    for (const prompt of detail.querySelectorAll(".prompt")) prompt.scrollTop = prompt.scrollHeight; // what was asked last
    for (const crumb of crumbs) crumb.addEventListener("click", () => { select(find(crumb.dataset.path.split(","))); root.querySelector("[tabindex='0']").focus(); });
  }

  // ---- mouse and keys ----
  root.addEventListener("click", (event) => {
    const item = event.target.closest("[role=treeitem]");
    if (!item) return;
    if (item.getAttribute("aria-selected") === "true" || event.target.closest(".twist")) item.getAttribute("aria-expanded") === "true" ? close(item) : open(item);
    else open(item);
    select(item);
    item.focus({ preventScroll: true });
    if (matchMedia("(max-width: 800px)").matches && !event.target.closest(".twist")) detail.scrollIntoView({ block: "start" });
  });
  root.addEventListener("keydown", (event) => {
    const item = event.target.closest("[role=treeitem]");
    const visible = [...root.querySelectorAll("[role=treeitem]")].filter((other) => !other.closest("ul[hidden]"));
    const place = visible.indexOf(item), expanded = item.getAttribute("aria-expanded");
    let next = { ArrowDown: visible[place + 1], ArrowUp: visible[place - 1], Home: visible[0], End: visible[visible.length - 1] }[event.key];
    if (event.key === "ArrowRight") expanded === "false" ? open(item) : (next = expanded === "true" ? visible[place + 1] : null);
    else if (event.key === "ArrowLeft") expanded === "true" ? close(item) : (next = item.parentElement.closest("[role=treeitem]"));
    else if (event.key === "Enter" || event.key === " ") detail.focus();
    else if (!["ArrowDown", "ArrowUp", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    if (next) { select(next); next.focus(); }
  });
  detail.addEventListener("keydown", (event) => { if (event.key === "Escape") root.querySelector("[tabindex='0']")?.focus(); });
  document.getElementById("tree-controls").addEventListener("submit", (event) => event.preventDefault());
  runs.addEventListener("change", chooseRun);
  steps.addEventListener("change", chooseStep);
  items.addEventListener("change", chooseItem);
  fill(runs, index.map((entry, place) => [entry.run, place]));
  const first = index.findIndex((entry) => entry.steps.length);
  runs.value = Math.max(first, 0);
  chooseRun();
})();
