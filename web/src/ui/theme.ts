export type Theme = 'system' | 'light' | 'dark'

const KEY = 'jiffy-theme'

export function theme(): Theme {
  const stored = localStorage.getItem(KEY)
  return stored === 'light' || stored === 'dark' ? stored : 'system'
}

export function setTheme(next: Theme) {
  if (next === 'system') {
    localStorage.removeItem(KEY)
    delete document.documentElement.dataset.theme
  } else {
    localStorage.setItem(KEY, next)
    document.documentElement.dataset.theme = next
  }
}

setTheme(theme())
