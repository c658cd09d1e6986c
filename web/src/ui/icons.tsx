import type { ReactElement } from 'react'

const paths = {
  overview: 'M3 13h5V3H3zM10 17h7V9h-7zM3 17h5v-2H3zM10 7h7V3h-7z',
  sandboxes: 'M10 2.5 16.5 6v8L10 17.5 3.5 14V6zM3.5 6 10 9.5 16.5 6M10 9.5v8',
  snapshots: 'M4 5.5h3l1.2-2h3.6l1.2 2h3v10H4zM10 13.2a2.7 2.7 0 1 0 0-5.4 2.7 2.7 0 0 0 0 5.4z',
  lineage:
    'M6 4.5v11M6 8c0 3 8 1 8 4.5v3M6 3.8a1.3 1.3 0 1 0 0-.1M6 17.4a1.3 1.3 0 1 0 0-.1M14 17.4a1.3 1.3 0 1 0 0-.1',
  templates: 'M3.5 4h13v4h-13zM3.5 10.5h6v5.5h-6zM12 10.5h4.5V16H12z',
  functions: 'M13 4.5c-2-1-3 0-3.300 2L8.300 13.500c-.3 2-1.300 3-3.300 2M6.500 9h6',
  hosts: 'M3.500 4h13v5h-13zM3.500 11h13v5h-13zM6 6.500h.01M6 13.500h.01',
  keys: 'M8 12.5a4 4 0 1 1 3.2-2.6L17 15.5V17h-3v-1.8h-1.8v-1.8l-1-1M7 8.3h.01',
  audit: 'M5 3.500h10v13H5zM7.500 7h5M7.500 10h5M7.500 13h3',
  plus: 'M10 4v12M4 10h12',
  more: 'M5 10h.01M10 10h.01M15 10h.01',
  pause: 'M7 5v10M13 5v10',
  play: 'M7 4.5v11l8-5.5z',
  kill: 'M5.5 5.5l9 9M14.5 5.5l-9 9',
  fork: 'M6 4v12M6 9c0 3.5 8 1 8 5M6 4.1a1 1 0 1 0 0-.1M6 16.1a1 1 0 1 0 0-.1M14 15.1a1 1 0 1 0 0-.1',
  back: 'M4 9h8a4 4 0 0 1 0 8H9M4 9l4-4M4 9l4 4',
  restart: 'M16 10a6 6 0 1 1-2-4.5M16 3v3.5h-3.5',
  clock: 'M10 17a7 7 0 1 0 0-14 7 7 0 0 0 0 14zM10 6.5V10l2.5 2',
  copy: 'M7 7h9v9H7zM4 13V4h9',
  command: 'M4 5l4 4.5L4 14M10 15h6',
  download: 'M10 3v9M6 9l4 4 4-4M4 16.5h12',
  upload: 'M10 13V4M6 8l4-4 4 4M4 16.5h12',
  trash: 'M4 6h12M8 6V4h4v2M6 6l.7 10h6.6L14 6',
  edit: 'M4 16l1-4 8-8 3 3-8 8z',
  file: 'M6 3h5l4 4v10H6zM11 3v4h4',
  folder: 'M3 5.5h5l1.5 2H17v8H3z',
  search: 'M9 14a5 5 0 1 0 0-10 5 5 0 0 0 0 10zM13 13l4 4',
  open: 'M8 5H4v11h11v-4M11 4h5v5M16 4l-7 7',
  expand: 'M4 8V4h4M16 8V4h-4M4 12v4h4M16 12v4h-4',
  check: 'M4 10.5l4 4 8-9',
  signOut: 'M9 4H4v12h5M13 7l3 3-3 3M16 10H8',
  theme: 'M10 3a7 7 0 1 0 7 7c-4 1.5-8.500-3-7-7z',
  refresh: 'M16 10a6 6 0 1 1-2-4.5M16 3v3.500h-3.500',
} as const

export type IconName = keyof typeof paths

export function Icon({ name }: { name: IconName }): ReactElement {
  return (
    <svg
      viewBox="0 0 20 20"
      fill="none"
      stroke="currentColor"
      strokeWidth="1.6"
      strokeLinecap="round"
      strokeLinejoin="round"
      width="16"
      height="16"
      aria-hidden="true"
      focusable="false">
      <path d={paths[name]} strokeWidth={name === 'more' ? 2.6 : undefined} />
    </svg>
  )
}

export function Logo() {
  return (
    <svg
      viewBox="0 0 24 24"
      fill="none"
      stroke="currentColor"
      strokeWidth="2"
      strokeLinejoin="round"
      aria-hidden="true">
      <path d="M12 2.500 20.500 7v10L12 21.500 3.500 17V7z" />
      <path d="M13 7v6.500a2.500 2.500 0 0 1-5 0" strokeLinecap="round" />
    </svg>
  )
}
