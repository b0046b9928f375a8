// Looks at every page of the built site in Chromium, at desktop and phone width.
//
//   node tools/docs_check.js FOLDER [--screenshots FOLDER]
//
// Fails on: links and anchors that lead nowhere, a page wider than the window, text with too little
// contrast and other violations of WCAG 2 AA, errors in the console, requests to other hosts, a search
// that finds nothing when the site is opened from its folder.
"use strict";

const fs = require("fs");
const http = require("http");
const path = require("path");
const { chromium } = require("playwright-core");
const AXE = fs.readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

const SITE = path.resolve(process.argv[2]);
const SHOTS = process.argv[3] === "--screenshots" ? process.argv[4] : null;
const WIDTHS = { desktop: 1280, phone: 390 };
const TYPES = { ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml" };
// Reading the site must not need the network: Chromium's own services are switched off as well.
const FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync " +
  "--disable-background-networking --disable-component-update";

// Browsers let the keyboard scroll such regions without a tabindex; the theme makes tables so.
const RULES = { runOnly: ["wcag2a", "wcag2aa"], rules: { "scrollable-region-focusable": { enabled: false } } };

const problems = [];
const report = (page, what) => problems.push(`${page}: ${what}`);

function pages(folder) {
  return fs.readdirSync(folder, { withFileTypes: true }).flatMap((entry) => {
    const full = path.join(folder, entry.name);
    if (entry.isDirectory()) return pages(full);
    return entry.name.endsWith(".html") ? [path.relative(SITE, full)] : [];
  });
}

function serve() {
  const server = http.createServer((request, response) => {
    const name = path.join(SITE, decodeURIComponent(new URL(request.url, "http://x").pathname));
    fs.readFile(name, (error, data) => {
      response.writeHead(error ? 404 : 200, { "Content-Type": TYPES[path.extname(name)] || "application/octet-stream" });
      response.end(data);
    });
  });
  return new Promise((ready) => server.listen(0, "127.0.0.1", () => ready(server)));
}

// Colours, names and roles are the same at every width.
async function checkAccess(page, name) {
  await page.evaluate(AXE);
  const { violations } = await page.evaluate((rules) => axe.run(rules), RULES);
  for (const { id, nodes } of violations) {
    report(name, `${id}, ${nodes.length} times: ${nodes[0].html.slice(0, 160)}`);
  }
}

// Checks a page at one width, and returns its anchors and links.
async function look(page, name, width, base) {
  await page.goto(base + name, { waitUntil: "load" });
  const wide = await page.evaluate(() => {
    const edge = document.documentElement.clientWidth;
    if (document.documentElement.scrollWidth <= edge) return null;
    const past = [...document.querySelectorAll("body *")].find((e) => e.getBoundingClientRect().right > edge + 1);
    return past ? past.outerHTML.slice(0, 120) : "unknown element";
  });
  if (wide) report(name, `wider than ${width} pixels: ${wide}`);
  if (width === WIDTHS.desktop) await checkAccess(page, name);
  if (SHOTS) await page.screenshot({ path: path.join(SHOTS, `${name.replaceAll("/", "_")}.${width}.png`), fullPage: true });
  return page.evaluate(() => ({
    ids: [...document.querySelectorAll("[id]")].map((e) => e.id),
    links: [...document.querySelectorAll("a[href], img[src]")].map((e) => e.href || e.src),
  }));
}

function checkLinks(contents, base) {
  for (const [name, { links }] of contents) {
    for (const link of new Set(links.filter((target) => target.startsWith(base)))) {
      const url = new URL(link);
      const target = decodeURIComponent(url.pathname.slice(1)) || "index.html";
      const anchor = decodeURIComponent(url.hash.slice(1));
      if (!fs.existsSync(path.join(SITE, target))) report(name, `broken link: ${target}`);
      else if (anchor && contents.has(target) && !contents.get(target).ids.includes(anchor)) {
        report(name, `no such anchor: ${target}#${anchor}`);
      }
    }
  }
}

async function checkSearch(page) {
  page.setDefaultTimeout(20000);
  try {
    await page.goto(`file://${SITE}/index.html`);
    await page.click("input.md-search__input");
    await page.keyboard.type("error feedback");
    await page.locator(".md-search-result__item a").first().waitFor();
  } catch (error) {
    report("search without a server", error.message.split("\n")[0]);
  }
}

async function main() {
  const server = await serve();
  const base = `http://127.0.0.1:${server.address().port}/`;
  const browser = await chromium.launch({ executablePath: process.env.CHROMIUM || "/usr/bin/chromium", args: FLAGS.split(" ") });
  const contents = new Map();
  for (const width of Object.values(WIDTHS)) {
    const context = await browser.newContext({ viewport: { width, height: 900 }, reducedMotion: "reduce" });
    const page = await context.newPage();
    let name = "";
    page.on("console", (line) => line.type() === "error" && report(name, `console: ${line.text()}`));
    page.on("pageerror", (error) => report(name, `script: ${error.message}`));
    page.on("request", (request) => {
      if (!request.url().startsWith(base) && !request.url().startsWith("data:")) report(name, `request to ${request.url()}`);
    });
    for (name of pages(SITE)) contents.set(name, await look(page, name, width, base));
    await context.close();
  }
  checkLinks(contents, base);
  await checkSearch(await browser.newPage());
  await browser.close();
  server.close();
  problems.forEach((problem) => console.log(problem));
  console.log(`${contents.size} pages at ${Object.values(WIDTHS).join(" and ")} pixels: ${problems.length} problems`);
  process.exitCode = problems.length ? 1 : 0;
}

main();
