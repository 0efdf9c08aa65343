"use strict";
// Learning curves: one uPlot chart a figure, drawn when it comes near the screen.
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const { groups, axes, charts } = read("curves");
  const drawn = new Map(); // figure → {plot, lines}
  const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
  const WHOLE = Array.from({ length: 12 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat(); // steps are
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const color = (index) => css(`--c${index % 8}`);
  const faded = (index, share) => `color-mix(in srgb, ${color(index)} ${share}%, transparent)`;
  const xAxis = document.getElementById("x-axis");
  const smoothing = document.getElementById("smoothing");
  const hiddenGroups = () =>
    new Set([...document.querySelectorAll("input[name=group]:not(:checked)")].map((box) => Number(box.value)));

  function format(value) {
    if (value == null || !isFinite(value)) return "–";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
    return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  }

  // Exponential moving average that starts at the first value (bias-corrected); null stays a gap.
  function smooth(values, weight) {
    if (!weight) return values;
    let sum = 0, norm = 0;
    return values.map((value) => {
      if (value == null) return value;
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  }

  function look(line, variants) {
    // Colours tell runs apart where there are several, else agents.
    const variant = Math.max(variants.indexOf(line.variant), 0);
    const several = groups.length > 1;
    return { color: several ? line.group : variant, dash: several ? DASHES[variant % DASHES.length] : [] };
  }

  function draw(figure) {
    erase(figure);
    const chart = charts[Number(figure.dataset.chart)];
    const which = Number(xAxis.value), weight = Number(smoothing.value), hidden = hiddenGroups();
    const lines = chart.lines.filter((line) => !hidden.has(line.group));
    const variants = [...new Set(chart.lines.map((line) => line.variant))];
    const tables = [], series = [{}], bands = [], shown = [];
    for (const line of lines) {
      const { color: index, dash } = look(line, variants);
      const columns = [axes[line.axis][which], smooth(line.y, weight)];
      series.push({
        stroke: line.main ? color(index) : faded(index, 35), width: line.main ? 2 : 1, dash,
        points: line.main ? { size: 5, fill: color(index) } : { show: line.y.length === 1 },
      });
      if (line.main) shown.push({ line, at: series.length - 1, index, dash });
      if (line.low) {
        columns.push(smooth(line.high, weight), smooth(line.low, weight));
        const edge = { stroke: "transparent", width: 0, points: { show: false } };
        series.push(edge, { ...edge });
        bands.push({ series: [series.length - 2, series.length - 1], fill: faded(index, 18) });
      }
      tables.push(columns);
    }
    if (!tables.length) return;
    const place = figure.querySelector(".plot");
    const axis = { stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") }, font: "12px system-ui, sans-serif" };
    const values = (_, splits) => splits.map((v) => (Math.abs(v) >= 1e5 ? Intl.NumberFormat("en", { notation: "compact" }).format(v) : format(v)));
    const plot = new uPlot({
      width: place.clientWidth, height: 190, legend: { show: false },
      padding: [8, 10, 0, 0], series, bands,
      scales: {
        x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        y: { range: yRange },
      },
      axes: [{ ...axis, values, space: 60, size: 34, incrs: WHOLE }, { ...axis, values, size: (_, texts) => 16 + 7 * Math.max(3, ...(texts ?? []).map((text) => text.length)) }],
      cursor: { points: { size: 7 }, drag: { x: true, y: false } },
      hooks: { setCursor: [(u) => legend(figure, u, shown, variants)] },
    }, uPlot.join(tables), place);
    drawn.set(figure, plot);
    legend(figure, plot, shown, variants);
  }

  function yRange(_, low, high) {
    if (low == null) return [0, 1];
    if (low === 0 && high === 0) return [0, 1];
    if (low === high) return [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
    return uPlot.rangeNum(low, high, 0.08, true);
  }

  // The value of a line at a place of the joined axis, or the last one before it.
  function valueAt(column, place) {
    for (let i = place; i >= 0; i--) if (column[i] !== undefined) return column[i];
    return null;
  }

  function legend(figure, plot, shown, variants) {
    const last = plot.data[0].length - 1;
    const place = plot.cursor.idx ?? last;
    const head = document.createElement("span");
    head.textContent = `${xAxis.selectedOptions[0].textContent} ${format(plot.data[0][place])}`;
    const entry = ({ at, index, dash }, name) => {
      const all = document.createElement("span"), swatch = document.createElement("i"), value = document.createElement("b");
      swatch.className = "swatch";
      swatch.style.borderTop = `3px ${dash.length ? (dash[0] < 3 ? "dotted" : "dashed") : "solid"} ${color(index)}`;
      value.textContent = format(valueAt(plot.data[at], place));
      all.append(swatch, name ? `${name} ` : "", value);
      return all;
    };
    const target = figure.querySelector(".legend");
    if (groups.length > 1 && variants.length > 1) target.replaceChildren(head, grid(shown, variants, entry));
    else target.replaceChildren(head, ...shown.map((own) => entry(own, groups.length > 1 ? groups[own.line.group] : own.line.variant)));
  }

  // Several runs and several agents: a row a run, a column an agent.
  function grid(shown, variants, entry) {
    const table = document.createElement("table");
    table.createTHead().insertRow().append(...["", ...variants].map((text) => cell("th", text)));
    const body = table.createTBody();
    for (const group of new Set(shown.map(({ line }) => line.group))) {
      const row = body.insertRow();
      row.append(cell("th", groups[group]));
      for (const variant of variants) {
        const own = shown.filter(({ line }) => line.group === group && line.variant === variant);
        row.append(cell("td", ...own.map((each) => entry(each, own.length > 1 ? each.line.run : ""))));
      }
    }
    return table;
  }
  function cell(tag, ...children) {
    const element = document.createElement(tag);
    element.append(...children);
    return element;
  }

  function erase(figure) {
    drawn.get(figure)?.destroy();
    drawn.delete(figure);
    figure.querySelector(".legend").replaceChildren();
  }

  function moveCursor(event) {
    const plot = drawn.get(event.currentTarget);
    if (!plot) return;
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (event.key === "Escape") plot.setData(plot.data);
    else if (event.key === "Home" || event.key === "End" || step) {
      event.preventDefault();
      const last = plot.data[0].length - 1;
      const from = plot.cursor.idx ?? last;
      const to = event.key === "Home" ? 0 : event.key === "End" ? last : Math.min(Math.max(from + step, 0), last);
      plot.setCursor({ left: plot.valToPos(plot.data[0][to], "x"), top: plot.over.clientHeight / 2 });
    }
  }

  const figures = [...document.querySelectorAll("figure.chart")];
  const redraw = () => { paintSwatches(); [...drawn.keys()].forEach(draw); };
  function paintSwatches() {
    for (const swatch of document.querySelectorAll(".swatch[data-color]"))
      swatch.style.borderTop = `3px solid ${color(Number(swatch.dataset.color))}`;
  }
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
  }, { rootMargin: "600px" });
  const sized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const plot = drawn.get(target.closest("figure"));
      if (plot && target.clientWidth && plot.width !== target.clientWidth) plot.setSize({ width: target.clientWidth, height: plot.height });
    }
  });
  for (const figure of figures) {
    seen.observe(figure);
    sized.observe(figure.querySelector(".plot"));
    figure.addEventListener("keydown", moveCursor);
  }
  document.getElementById("chart-controls")?.addEventListener("input", redraw);
  document.getElementById("chart-controls")?.addEventListener("submit", (event) => event.preventDefault());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const drawAbove = (target) => figures // so that a link does not miss: a chart grows as it is drawn
    .filter((figure) => !drawn.has(figure) && target && figure.compareDocumentPosition(target) & Node.DOCUMENT_POSITION_FOLLOWING)
    .forEach(draw);
  for (const link of document.querySelectorAll("a[href^='#']"))
    link.addEventListener("click", () => drawAbove(document.querySelector(link.getAttribute("href"))));
  addEventListener("beforeprint", () => figures.filter((figure) => !drawn.has(figure)).forEach(draw));
  paintSwatches();
})();
