// Uses the browser of a sandbox with Playwright: fills a form of a page that a server in the sandbox
// serves, and writes a screenshot to a file.
//
//   npm install @jiffy/sandbox playwright-core && node browser.mjs FILE
//
// The template `browser` contains a running headless Chromium, so that nothing is installed.
import { chromium } from 'playwright-core'
import { Sandbox } from '@jiffy/sandbox'

const PAGE = `<title>greeting</title>
<input aria-label="name"><button onclick="result.textContent = 'Hello, ' + document.querySelector('input').value">greet</button>
<output id="result"></output>`

const [file] = process.argv.slice(2)
const sandbox = await Sandbox.create('browser', { allowInternetAccess: false })
try {
  await sandbox.files.write('site/index.html', PAGE)
  await sandbox.commands.run('python3 -m http.server 8000 --directory site', { background: true })
  await sandbox.waitForPort(8000)
  // With a domain the address is `https://${sandbox.getHost(9222)}`.
  const browser = await chromium.connectOverCDP(`${process.env.JIFFY_URL}/sandboxes/${sandbox.sandboxId}/proxy/9222`)
  const page = await browser.contexts()[0].newPage()
  await page.goto('http://127.0.0.1:8000/')
  await page.getByLabel('name').fill('Ada')
  await page.getByRole('button').click()
  console.log(`${await page.title()}: ${await page.locator('#result').textContent()}`)
  await page.screenshot({ path: file })
  await browser.close()
} finally {
  await sandbox.kill()
}
