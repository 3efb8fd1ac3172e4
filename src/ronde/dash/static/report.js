// Draws the plots of the report with uPlot. The page holds the plots as JSON; see PlotData in report.py.
(() => {
  "use strict";
  const HEIGHT = 260;
  const NUM_COLORS = 8;
  const MAX_MARKED = 60; // a line of at most so many points has a dot at each

  const WHOLE_STEPS = [...Array(12).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const color = (index) => () => css(`--c${index % NUM_COLORS}`);

  // Three or four digits, thousands as k, M, G: format_compact_number in text.py.
  function compact(value) {
    if (value == null || !isFinite(value)) return "–";
    const size = Math.abs(value);
    for (const [limit, divisor, letter] of [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]) {
      if (size >= limit) return +(value / divisor).toPrecision(3) + letter;
    }
    if (size >= 100 || Number.isInteger(value)) return value.toFixed(0);
    return size >= 1e-3 ? String(+value.toPrecision(3)) : value.toExponential(1);
  }

  const tick = (value) => (value == null ? "" : Math.abs(value) >= 1e4 ? compact(value) : String(+value.toPrecision(12)));

  function lastKnown(values) {
    for (let index = values.length - 1; index >= 0; index--) if (values[index] != null) return values[index];
    return null;
  }

  // Returns which points get a dot: all where there is room, all of a short line, and those between two gaps. In
  // joined data, null is a gap and undefined is an x that only another line has.
  function markedPoints(u, seriesIndex, show) {
    if (show) return null;
    const values = u.data[seriesIndex];
    const known = [...values.keys()].filter((index) => values[index] !== undefined);
    const points = known.filter((index) => values[index] !== null);
    if (points.length <= MAX_MARKED) return points;
    return known.filter((index, k) => values[index] !== null && values[known[k - 1]] == null && values[known[k + 1]] == null);
  }

  function yRange(plot) {
    const end = (limit) => (limit == null ? { pad: 0.1, mode: 0 } : { pad: 0.1, soft: limit, mode: 1 });
    return { min: end(plot.y_min), max: end(plot.y_max) };
  }

  function axis(label, more) {
    return Object.assign({
      label, labelSize: 20, labelFont: "12px system-ui, sans-serif", font: "12px system-ui, sans-serif",
      stroke: () => css("--soft"), grid: { stroke: () => css("--grid"), width: 1 },
      ticks: { show: false }, values: (u, splits) => splits.map(tick),
    }, more);
  }

  function draw(element, plot) {
    const data = uPlot.join(plot.lines.map((line) => [line.x, line.y]));
    const series = plot.lines.map((line, index) => ({
      label: line.name, width: 2, stroke: color(index),
      points: { size: 5, filter: markedPoints, fill: color(index) },
      value: (u, value, seriesIndex, at) => compact(at == null ? lastKnown(data[seriesIndex]) : value),
    }));
    const chart = new uPlot({
      width: element.clientWidth, height: HEIGHT,
      scales: {
        x: { time: false, range: (u, min, max) => (min === max ? [min - 1, max + 1] : [min, max]) },
        y: { range: yRange(plot) },
      },
      axes: [axis(plot.x_label, { size: 32, incrs: WHOLE_STEPS }), axis(plot.y_label, { size: 52 })],
      series: [{ label: plot.x_label, value: (u, value) => compact(value ?? data[0][data[0].length - 1]) }, ...series],
      cursor: { y: false },
      legend: { markers: { width: 0, fill: (u, index) => `var(--c${(index - 1) % NUM_COLORS})` } },
    }, data, element);
    new ResizeObserver(() => chart.setSize({ width: element.clientWidth, height: HEIGHT })).observe(element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => chart.redraw());
  }

  const plots = JSON.parse(document.getElementById("plots").textContent);
  document.querySelectorAll("[data-plot]").forEach((element) => draw(element, plots[element.dataset.plot]));
})();
