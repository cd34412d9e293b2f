import { X } from "lucide-react";
import { type ReactNode, useEffect, useId, useRef, useState } from "react";
import { IconButton } from "./Button";
import styles from "./Dialog.module.css";
import { closeOnEscape, PortalHost } from "./portal";

interface Props {
  open: boolean;
  title: string;
  onClose: () => void;
  children: ReactNode;
  /** The row of buttons at the end. */
  actions?: ReactNode;
  wide?: boolean;
}

/** A window over the page. The browser's own dialog keeps the focus inside it and closes it on Escape. */
export function Dialog({ open, title, onClose, children, actions, wide = false }: Props) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [host, setHost] = useState<HTMLElement | null>(null);
  const heading = useId();
  useEffect(() => {
    const element = dialog.current;
    if (element === null) return;
    setHost(element);
    if (open && !element.open) {
      element.showModal();
      element.querySelector<HTMLElement>("form :is(input, select, textarea)")?.focus();
    }
    if (!open && element.open) element.close();
  }, [open]);
  return (
    <dialog
      ref={dialog}
      className={`${styles.dialog} ${wide ? styles.wide : ""}`}
      aria-labelledby={heading}
      onCancel={(event) => {
        event.preventDefault();
        onClose();
      }}
      onKeyDown={closeOnEscape(onClose)}
      onClick={(event) => {
        if (event.target === dialog.current) onClose();
      }}
    >
      {open && (
        <PortalHost value={host}>
          <div className={styles.body}>
            <header className={styles.head}>
              <h2 id={heading}>{title}</h2>
              <IconButton label="Close" small onClick={onClose}>
                <X />
              </IconButton>
            </header>
            {children}
            {actions && <footer className={styles.actions}>{actions}</footer>}
          </div>
        </PortalHost>
      )}
    </dialog>
  );
}

/** The fields of a dialog and the button that ends it; Enter in a field ends it, too. */
export function DialogForm({ onSubmit, children }: { onSubmit: () => void; children: ReactNode }) {
  return (
    <form
      className={styles.form}
      onSubmit={(event) => {
        event.preventDefault();
        onSubmit();
      }}
    >
      {children}
    </form>
  );
}
