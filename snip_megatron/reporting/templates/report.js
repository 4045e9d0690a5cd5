"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const figures = read("figures-data");
  const maps = read("maps-data");
  const byId = (id) => document.getElementById(id);
  const narrow = window.matchMedia("(max-width: 600px)");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const config = {
    responsive: true,
    displaylogo: false,
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    displayModeBar: !narrow.matches,
  };

  // ---- theme ------------------------------------------------------------------------------------------------------
  function themed(layout) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: colour("--line"), linecolor: colour("--line"), zerolinecolor: colour("--line") };
    return {
      ...layout,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour("--text"), size: 12, family: "system-ui, -apple-system, 'Segoe UI', sans-serif" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--quiet"), activecolor: colour("--accent") },
      hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--line"), font: { color: colour("--text") }, align: "left" },
      xaxis: { ...layout.xaxis, ...axis, automargin: true },
      yaxis: { ...layout.yaxis, ...axis, automargin: true },
    };
  }

  function drawFigures() {
    for (const [name, figure] of Object.entries(figures)) {
      if (figure) Plotly.react(name, figure.data, themed(figure.layout), config);
    }
  }

  // ---- map --------------------------------------------------------------------------------------------------------
  const scientific = (value) => (value === null || value === undefined ? "–" : value.toExponential(2));
  const linearName = (row, column) => `${maps.rows[row].stack}.layers.${maps.layers[column]}.${maps.rows[row].path}`;
  const harmOf = (map, row, column) => (map.scores === null ? null : maps.harms[map.scores][row][column]);
  const scoresOf = (map, row, column) => (map.scores === null ? null : maps.scores[map.scores][row][column]);

  function isChanged(index, row, column) {
    return index > 0 && maps.maps[index - 1].codes[row][column] !== maps.maps[index].codes[row][column];
  }

  function hoverText(index, row, column) {
    const map = maps.maps[index];
    const chosen = maps.formats[map.codes[row][column]].name;
    const lines = [`<b>${linearName(row, column)}</b>`, `${maps.rows[row].gemm}: <b>${chosen}</b>`];
    if (isChanged(index, row, column)) {
      lines.push(`before: ${maps.formats[maps.maps[index - 1].codes[row][column]].name}`);
    }
    const scores = scoresOf(map, row, column);
    for (const [format, [loss, weight, q]] of Object.entries(scores || {})) {
      const text = `${format}: ΔL ${scientific(loss)}  ΔW ${scientific(weight)}  Q ${scientific(q)}`;
      lines.push(format === chosen ? `<b>${text}</b>` : text);
    }
    return lines.join("<br>");
  }

  function colourScale() {
    const last = maps.formats.length - 1;
    const stops = [];
    maps.formats.forEach((format, code) => {
      stops.push([code / (last + 1), format.colour], [(code + 1) / (last + 1), format.colour]);
    });
    return { colorscale: stops, zmin: -0.5, zmax: last + 0.5 };
  }

  function drawMap(index) {
    const map = maps.maps[index];
    const grid = (cell) => map.codes.map((row, r) => row.map((code, c) => (code === null ? null : cell(r, c))));
    const common = {
      type: "heatmap",
      x: maps.layers.map(String),
      y: maps.rows.map((row) => row.label),
      customdata: grid((r, c) => hoverText(index, r, c)),
      hovertemplate: "%{customdata}<extra></extra>",
      hoverongaps: false,
      xgap: maps.layers.length <= 48 ? 2 : 0.5,
      ygap: 2,
    };
    const formats = {
      ...common,
      z: map.codes,
      text: grid((r, c) => (isChanged(index, r, c) ? "●" : "")),
      texttemplate: maps.layers.length <= 48 ? "%{text}" : "",
      textfont: { color: "#ffffff", size: 10 },
      showscale: false,
      ...colourScale(),
    };
    const layout = themed({
      height: 60 + 26 * maps.rows.length,
      margin: { l: 90, r: 12, t: 8, b: 44 },
      xaxis: { title: { text: "layer" }, type: "category", showgrid: false, fixedrange: true },
      yaxis: { autorange: "reversed", showgrid: false, fixedrange: true, ticks: "" },
    });
    Plotly.react("map", [formats], layout, { ...config, displayModeBar: false });
    Plotly.react("harm", [harmTrace(map, common, grid)], layout, { ...config, displayModeBar: false });
    byId("map-caption").textContent = caption(index);
    byId("slider").setAttribute("aria-valuetext", caption(index));
    byId("previous").disabled = index === 0;
    byId("next").disabled = index === maps.maps.length - 1;
    fillTable(index);
  }

  // Colours follow the logarithm of the harm, over four decades below the highest.
  function harmTrace(map, common, grid) {
    const log = (value) => (value > 0 ? Math.log10(value) : -Infinity);
    const highest = Math.max(...maps.harms.flat(2).map(log), -30);
    const ticks = [0, 1, 2, 3, 4].map((down) => highest - down);
    return {
      ...common,
      z: grid((r, c) => { const harm = harmOf(map, r, c); return harm === null ? null : Math.max(log(harm), highest - 4); }),
      zmin: highest - 4,
      zmax: highest,
      colorscale: [[0, "#fff3e4"], [0.5, "#e8833a"], [1, "#6d1f0a"]],
      colorbar: { thickness: 10, outlinewidth: 0, tickvals: ticks, ticktext: ticks.map((tick) => (10 ** tick).toExponential(0)) },
    };
  }

  function caption(index) {
    const map = maps.maps[index];
    const version = map.version === null ? "" : ` v${map.version}`;
    const parts = [`Map${version}, ${index + 1} of ${maps.maps.length}`, `in force from step ${map.step}`, map.status];
    if (map.achieved !== null) parts.push(`fp4 share ${(100 * map.achieved).toFixed(2)} %`);
    if (map.speedup !== null) parts.push(`predicted speedup ${map.speedup.toFixed(3)}`);
    if (map.changed !== null) parts.push(`${map.changed} choices changed`);
    return parts.join(" · ");
  }

  function drawLegend() {
    const used = new Set(maps.maps.flatMap((map) => map.codes.flat()));
    maps.formats.forEach((format, code) => {
      if (!used.has(code)) return;
      const item = document.createElement("li");
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = format.colour;
      item.append(swatch, format.name);
      byId("legend").append(item);
    });
  }

  function fillTable(index) {
    const map = maps.maps[index];
    const table = byId("choices-table");
    table.replaceChildren();
    const head = table.createTHead().insertRow();
    for (const name of ["linear and GEMM", "harm", "format", "before", "ΔL", "ΔW", "cost"]) {
      const cell = document.createElement("th");
      cell.textContent = name;
      head.append(cell);
    }
    const body = table.createTBody();
    const cells = maps.layers.flatMap((_, c) => maps.rows.map((__, r) => [r, c])).filter(([r, c]) => map.codes[r][c] !== null);
    cells.sort((a, b) => (harmOf(map, ...b) ?? -1) - (harmOf(map, ...a) ?? -1));
    for (const [r, c] of cells) {
      const format = maps.formats[map.codes[r][c]].name;
      const before = isChanged(index, r, c) ? maps.formats[maps.maps[index - 1].codes[r][c]].name : "";
      const figures = (scoresOf(map, r, c) || {})[format] || [null, null, null];
      const line = body.insertRow();
      const texts = [`${linearName(r, c)}:${maps.rows[r].gemm}`, scientific(harmOf(map, r, c)), format, before];
      for (const text of [...texts, ...figures.map(scientific)]) {
        line.insertCell().textContent = text;
      }
    }
  }

  // ---- start ------------------------------------------------------------------------------------------------------
  const slider = byId("slider");
  const show = () => maps && drawMap(Number(slider.value));
  const redraw = () => { drawFigures(); show(); };
  if (maps) {
    drawLegend();
    slider.addEventListener("input", show);
    for (const [id, move] of [["previous", -1], ["next", 1]]) {
      byId(id).addEventListener("click", () => { slider.value = Number(slider.value) + move; show(); });
    }
  }
  dark.addEventListener("change", redraw);
  redraw();
})();
