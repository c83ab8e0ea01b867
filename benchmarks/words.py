"""Plain English words that conversations are made of; most are one token in most vocabularies."""

from __future__ import annotations

TEXT = """
about above across after again air almost along animal answer apple around autumn away baby back ball bank basket
beach bear beautiful because before began behind below between bird blue boat body book both bottle bottom box branch
bread bridge bright bring brother brown build busy butter cake call camp capital captain carry castle cause chair
change children choose circle city class clean clear climb clock close cloud coast cold color common complete cook
cool corner cotton count country course cover cross crowd current dance danger dark daughter decide deep desert dinner
direct distance doctor door double doubt draw dream dress drink drive early earth east easy edge electric empty energy
engine evening every exact example eye family famous farm father favor field figure fire fish floor flower follow food
forest forward fresh friend fruit garden gather general gentle glass gold grass great green ground group guide hand
happy harbor heart heavy hill history holiday honest horse hour house hundred idea island journey kitchen knife ladder
lake language large laugh leaf lesson letter level library light line listen little machine market meadow measure
method middle mile milk minute mirror money month moon morning mother mountain music narrow nation nature needle never
night noise north number ocean office orange order paint paper parent park party pencil people picture piece plain
plane plant plate pocket poem point pool position power present price problem promise proud quarter question quiet
race rain reach ready reason record region repair result river road rock room round sail salt sand school science
season second seed sentence service shape sheep shell ship shoe shore silver simple sister sky sleep small smile snow
soft soil soldier song south space spring square stand star station steel stone storm story straight street strong
student sugar summer sun surface sweet table teacher thousand thunder ticket tower town trade train travel tree
triangle valley village visit voice wagon wait walk wall warm watch water weather week west wheel white wild window
winter wire wonder wood word world yellow young
"""
WORDS = tuple(TEXT.split())
